"""Token files: made from documents (`preparation/`, conversations by `chat/`), read and drawn from by everything else here."""
