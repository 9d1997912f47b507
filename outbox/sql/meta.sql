select version, lanes::integer, hash from {schema}.meta
