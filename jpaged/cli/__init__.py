"""The command line. main.py registers the commands, a file a group; engine_options.py makes the flags of settings."""
