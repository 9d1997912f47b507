-- Where Tail starts: $1 'now', 'earliest' or 'at', $2 the time. The snapshot whose events are left out, and a number that all others are above:
-- the floor of a tick that had its id before any transaction which that snapshot does not see.
select s.snapshot::text,
       coalesce((select t.floor from {schema}.tick t where t.xid <= pg_snapshot_xmin(s.snapshot) order by t.id desc limit 1), 0)
from (select case $1::text
        when 'now' then pg_current_snapshot()
        when 'at' then (select t.snapshot from {schema}.tick t where t.at <= $2::timestamptz order by t.id desc limit 1)
      end as found) f
cross join lateral (select coalesce(f.found, '1:1:'::pg_snapshot) as snapshot) s
