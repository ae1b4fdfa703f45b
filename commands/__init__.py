"""What the longer commands of manage.py do, one file each, and what these share."""
