"""`ithaca bench`: the tables of the field, measured row by row on the device that is here."""
