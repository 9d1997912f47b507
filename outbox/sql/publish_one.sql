-- One event. $1 lane, $2 the key's lock (null = unkeyed: the function is strict and takes none), $3 type, $4 key, $5 payload,
-- $6 headers. The inner row holds the transaction's id and the lock, so both are there before the sequence is drawn.
insert into {schema}.event (lane, seq, xid, type, key, payload, headers, published_at)
select $1::smallint, nextval('{schema}.event_seq'), x.xid, $3::text, $4::text, $5::bytea, $6::jsonb, clock_timestamp()
from (select pg_current_xact_id() as xid, pg_advisory_xact_lock($2::bigint) as locked offset 0) x
