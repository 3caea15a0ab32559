"""Files of an array: on this machine, or elsewhere and kept in a cache.

array_files.py    interface of the reader: place and bytes of a chunk, or an error
checksums.py      the list of SHA-256 beside an array
hub.py            whether the Hugging Face Hub answers; models from it or its cache
remote.py         files behind URLs, with retries and checks
remote_cache.py   files of a folder; remote ones are cached on this disk, up to a limit
"""
