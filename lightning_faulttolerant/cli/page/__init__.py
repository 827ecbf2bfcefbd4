"""HTML pages in one file each: document, tables and charts, without any library and without torch."""
