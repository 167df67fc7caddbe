"""Reading and checking ds_config.json."""
