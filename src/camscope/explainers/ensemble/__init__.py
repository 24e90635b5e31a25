"""Methods that combine the maps of other methods, layers or views."""
