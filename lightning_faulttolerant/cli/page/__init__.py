"""Pages of HTML in one file each: their document, tables and charts, without any library and without torch."""
