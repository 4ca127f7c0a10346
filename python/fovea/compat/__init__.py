"""Other libraries' functions on fovea's ops: their names, arguments, layouts and conventions."""
