"""Store that all pods of a release share: objects, encryption, writer and collector. Read `writer.py` first."""
