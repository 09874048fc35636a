"""Past one machine: what runs on a cluster, and what it costs. Only modules in here import Ray, and only when used."""
