"""Text -> token shards: cut into work units, encoded by several processes, merged, cached.

May import `minimind.data.loader` and below. Start in `prepare.py` for the cache of a run, in
`dataset_folder.py` for `minimind prepare`.

cache            folders that are built once and are complete or absent
chat_tokenizer   the tokenizer of a fine-tuning run
dataset_folder   a folder of shards that several jobs fill
encode           work units -> shards
inspect          `minimind data inspect`
merge            encoded units -> a folder with its manifest
prepare          text -> tokenizer and shards
ray_tasks        the units as tasks of Ray
remote           text and prepared folders by URL
unit_reader      the documents of a work unit in batches
work_units       sources -> work units, and plan.json that identifies them
workers          the processes of a host that encode together
"""
