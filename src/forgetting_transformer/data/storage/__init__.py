"""Files of an array: on this machine, or elsewhere and kept in a cache.

array_files.py    what the reader asks: where a chunk is, its bytes, and an error where there are none
checksums.py      the list of SHA-256 beside an array
remote.py         files behind URLs: what is tried again, for how long, and what is not
remote_cache.py   the files of a folder; those from elsewhere are kept on this disk, up to a limit
"""
