"""A pod's own tiers of block files: slots of one region of memory over files on disk. No context is known here.

Read `tiers.py` first. The records of blocks are in `kv_sidecar/blocks.py`.
"""
