-- Many events, arrays as in publish_one. Locks in sorted order first, then numbers in call order.
with x as materialized (select pg_current_xact_id() as xid),
locks as materialized (
  select count(pg_advisory_xact_lock(d.k)) as n
  from (select distinct k from unnest($2::bigint[]) k where k is not null order by k) d
)
insert into {schema}.event (lane, seq, xid, type, key, payload, headers, published_at)
select e.lane, nextval('{schema}.event_seq'), x.xid, e.type, e.key, e.payload, e.headers, clock_timestamp()
from x cross join locks
cross join unnest($1::smallint[], $3::text[], $4::text[], $5::bytea[], $6::jsonb[])
  with ordinality as e (lane, type, key, payload, headers, ord)
order by e.ord
