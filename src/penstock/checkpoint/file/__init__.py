"""Files: the header, reading and writing of entries, and how a new file replaces an old one."""
