"""Token files: made from documents (`preparation/`) and conversations (`chat/`); the rest reads them."""
