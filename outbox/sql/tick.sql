-- Appends a tick if something is new, and tells which is the newest, whether this is still the cluster of the log, and whether its sequence
-- still is what it must be: one that caches hands out numbers below a tip that was read before.
-- New: no tick yet; a number was drawn; the lagging floor has to catch up after a burst; or a transaction that the last
-- tick could not see has ended and may hold an event at or below the last tip. Such a one was in progress then: listed in the
-- snapshot, or at or above its xmax (the latest completed id plus one) and below the tick's own id, because it had its id
-- before it drew its number, and the tick took its own after reading the tip. Ids above that do not matter, so the
-- housekeeping of idle dispatchers makes no ticks. A range wider than 1,000 (many savepoints) counts as new when xmax moved.
with last as materialized (
  select t.id, t.floor, t.tip, t.snapshot,
         pg_snapshot_xmax(t.snapshot)::text::bigint as xmax, t.xid::text::bigint as xid
  from {schema}.tick t order by t.id desc limit 1
), state as materialized (
  select s.tip, pg_current_snapshot() as snapshot, pg_snapshot_xmax(pg_current_snapshot())::text::bigint as xmax,
         m.system_identifier = (select c.system_identifier from pg_control_system() c)
           and m.database_oid = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
           and coalesce((select l.xmax from last l), 0) <= pg_snapshot_xmax(pg_current_snapshot())::text::bigint
           and coalesce((select l.tip from last l), 0) <= s.tip as same
  from (select coalesce(pg_sequence_last_value(q.tableoid), 0) as tip from {schema}.event_seq q) s
  cross join {schema}.meta m
), sequence as materialized (
  select q.seqcache, q.seqincrement, q.seqcycle from pg_catalog.pg_sequence q where q.seqrelid = '{schema}.event_seq'::regclass
), added as (
  insert into {schema}.tick (id, floor, tip, snapshot)
  select coalesce(last.id, 0) + 1,
         coalesce((select t.tip from {schema}.tick t order by t.id desc offset 1 limit 1), 0),
         state.tip, state.snapshot
  from state cross join sequence left join last on true
  where state.same and sequence.seqcache = 1 and sequence.seqincrement = 1 and not sequence.seqcycle and (
       last.id is null
    or state.tip > last.tip
    or last.tip - last.floor > 10000
    or exists (select 1 from pg_snapshot_xip(last.snapshot) as p (xid) where pg_visible_in_snapshot(p.xid, state.snapshot))
    or exists (select 1 from generate_series(last.xmax, least(last.xid - 1, last.xmax + 1000)) as g (xid)
               where pg_visible_in_snapshot(g.xid::text::xid8, state.snapshot))
    or (last.xid - last.xmax > 1000 and state.xmax > last.xid + 1))
  returning id
)
select state.same, coalesce((select id from added), (select id from last), 0) as newest, exists (select 1 from added) as added,
       (select extract(epoch from min(s.due_at) - clock_timestamp())::float8 from {schema}.scheduled s) as next_due,
       sequence.seqcache, sequence.seqincrement, sequence.seqcycle
from state cross join sequence
