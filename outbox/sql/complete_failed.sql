-- As complete, and what became of single events, for lanes that moved: $12 lanes, $13 sequence numbers, $14 what to do (add, set,
-- remove), $15 attempts, $16 states, $17 seconds until due (null = not by itself), $18 errors. An added event is copied from the log.
with moved as (
  insert into {schema}.cursor (subscription, lane, n, from_tick, to_tick, pos, token)
  select $1::text, d.lane, c.n + 1, d.from_tick, d.to_tick, d.pos, d.token
  from unnest($2::smallint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::timestamptz[], $8::bigint[],
              $9::timestamptz[], $10::bigint[], $11::bigint[])
    as d (lane, token, old_from, old_pos, from_tick, from_at, to_tick, to_at, pos, old_n)
  cross join lateral (
    select c.n, c.from_tick, c.pos, c.token from {schema}.cursor c
    where c.subscription = $1::text and c.lane = d.lane order by c.n desc limit 1) c
  where c.n = d.old_n and c.token = d.token and c.from_tick = d.old_from and c.pos = d.old_pos
    and exists (select 1 from {schema}.tick f where f.id = d.from_tick and f.at = d.from_at)
    and (d.to_tick is null or exists (select 1 from {schema}.tick t where t.id = d.to_tick and t.at = d.to_at))
  order by d.lane
  on conflict do nothing
  returning lane
), change as materialized (
  select f.* from unnest($12::smallint[], $13::bigint[], $14::text[], $15::integer[], $16::text[], $17::float8[], $18::text[])
    as f (lane, seq, what, attempt, state, wait, error)
  where f.lane in (select lane from moved)
), added as (
  insert into {schema}.failed
    (subscription, lane, seq, key, type, payload, headers, published_at, attempt, state, due_at, last_error)
  select $1::text, e.lane, e.seq, e.key, e.type, e.payload, e.headers, e.published_at, f.attempt, f.state,
         clock_timestamp() + make_interval(secs => f.wait), f.error
  from change f join {schema}.event e on e.lane = f.lane and e.seq = f.seq
  where f.what = 'add'
  on conflict (subscription, lane, seq) do update  -- only after a replay: it stood there already
  set attempt = excluded.attempt, state = excluded.state, due_at = excluded.due_at, last_error = excluded.last_error
  where excluded.state <> 'parked'
), changed as (
  update {schema}.failed x
  set attempt = f.attempt, state = f.state, due_at = clock_timestamp() + make_interval(secs => f.wait), last_error = f.error,
      failed_at = clock_timestamp()
  from change f
  where f.what = 'set' and x.subscription = $1::text and x.lane = f.lane and x.seq = f.seq
), removed as (
  delete from {schema}.failed x using change f
  where f.what = 'remove' and x.subscription = $1::text and x.lane = f.lane and x.seq = f.seq
)
select lane from moved
