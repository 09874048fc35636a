"""Past one machine, on Ray: only this subpackage imports it, and only once a command is asked to run there."""
