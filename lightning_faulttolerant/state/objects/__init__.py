"""Object state: what training has changed on the user's own objects, found, carried, and restored in place."""
