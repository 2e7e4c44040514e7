"""The suite, as one package where a folder is one: its parts may use what others have."""
