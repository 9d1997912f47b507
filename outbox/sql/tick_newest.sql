select max(id) from {schema}.tick
