import os

# Read at import: nothing is looked up on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
