"""State in files: stores of pieces, the folder of a run, and arrays whose shards lie in a store."""
