"""Object state: the changes that training makes on the user's own objects, found, carried, and restored in place."""
