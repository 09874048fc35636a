"""Past one machine: what runs on a cluster, and what it would cost. Only modules in here import Ray, and only when used."""
