-- As publish_any, from one argument that every driver can send: a JSON array of events, payloads in base64.
with x as materialized (select pg_current_xact_id() as xid),
given as materialized (
  select r.*, a.ord
  from json_array_elements($1::text::json) with ordinality as a (e, ord)
  cross join lateral json_to_record(a.e) as r (lane smallint, lock bigint, type text, key text, payload text, headers jsonb, due timestamptz, dedup text)
), locks as materialized (
  select count(pg_advisory_xact_lock(d.lock)) as n
  from (select distinct g.lock from given g where g.lock is not null order by g.lock) d
), input as materialized (
  select g.*, coalesce(g.due > clock_timestamp(), false) as later, row_number() over (partition by g.dedup order by g.ord) as nth
  from locks cross join given g
), fresh as (
  insert into {schema}.dedup (key)
  select i.dedup from input i where i.dedup is not null and i.nth = 1 order by i.dedup
  on conflict do nothing
  returning key
), chosen as materialized (
  select i.* from input i where i.dedup is null or i.nth = 1 and i.dedup in (select key from fresh)
), scheduled as (
  insert into {schema}.scheduled (due_at, lane, lock, type, key, payload, headers)
  select c.due, c.lane, c.lock, c.type, c.key, decode(c.payload, 'base64'), c.headers from chosen c where c.later order by c.ord
)
insert into {schema}.event (lane, seq, xid, type, key, payload, headers, published_at)
select c.lane, nextval('{schema}.event_seq'), x.xid, c.type, c.key, decode(c.payload, 'base64'), c.headers, clock_timestamp()
from x cross join chosen c
where not c.later
order by c.ord
