-- A restore may have left the sequence behind the rows, or as one that was never called. Ahead only.
select setval('{schema}.event_seq', greatest(m.seq, s.last))
from (select coalesce(max(e.seq), 0) as seq from {schema}.event e) m,
     (select coalesce(pg_sequence_last_value(q.tableoid), q.last_value - 1) as last, q.is_called from {schema}.event_seq q) s
where m.seq > s.last or not s.is_called and s.last > 0
