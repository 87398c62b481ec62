"""The HTTP front: this process is the door itself."""
