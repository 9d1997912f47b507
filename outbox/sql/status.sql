-- The log as a whole.
select (select coalesce(pg_sequence_last_value(q.tableoid), 0) from {schema}.event_seq q),
       (select max(t.id) from {schema}.tick t),
       (select count(*) from {schema}.tick t),
       (select count(*) from {schema}.scheduled s)
