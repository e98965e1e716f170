"""The processes of a run: started, watched, stopped, and how each ends."""
