-- The present snapshot, how far the sequence has come, and for $1, a snapshot, the oldest transaction that it does not see.
select pg_current_snapshot()::text, coalesce(pg_sequence_last_value(s.tableoid), 0),
       pg_snapshot_xmin($1::text::pg_snapshot)::text::bigint
from {schema}.event_seq s
