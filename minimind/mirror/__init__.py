"""The copy of a run at a URL of object storage: uploaded beside training, resumed from."""
