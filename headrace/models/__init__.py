"""Models: where they lie (`repository.py`), what they take and give (`signature.py`), who runs
them (`backend.py` and its adapters), and which are ready now (`registry.py`).
"""
