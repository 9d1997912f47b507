-- The present snapshot, how far the sequence has come, and for $1, a snapshot, the oldest transaction that it does not see.
select pg_current_snapshot()::text, case when s.is_called then s.last_value else s.last_value - 1 end,
       pg_snapshot_xmin($1::text::pg_snapshot)::text::bigint
from {schema}.event_seq s
