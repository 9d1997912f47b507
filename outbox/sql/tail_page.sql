-- Events that became visible from one snapshot to another ($2, $3), behind the number $4, at most $5. $1 are the lanes.
select u.lane, u.seq, u.type, u.key, u.payload, u.headers, u.published_at
from unnest($1::smallint[]) as l (lane)
cross join lateral (
  select e.lane, e.seq, e.type, e.key, e.payload, e.headers, e.published_at
  from {schema}.event e
  where e.lane = l.lane and e.seq > $4::bigint
    and not pg_visible_in_snapshot(e.xid, $2::text::pg_snapshot) and pg_visible_in_snapshot(e.xid, $3::text::pg_snapshot)
  order by e.seq limit $5::integer) u
order by u.seq limit $5::integer
