"""The copy of a run at a URL of object storage: uploaded beside training, resumed from.

mirror       what a run calls: at the start, after each save, at the end
owner        `mirror.json`: which run the URL is of, and which start of it writes there
remote_run   files of the run at the URL: upload and verify, fetch and verify, delete
uploads      the thread that uploads checkpoints and deletes those that no rule keeps
"""
