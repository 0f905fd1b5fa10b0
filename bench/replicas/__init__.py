"""Several replicas behind one front: what the pool costs, and what deaths, joins, upgrades and second fronts do to streams."""
