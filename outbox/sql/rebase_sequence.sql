-- A restore may have left the sequence behind the rows. Ahead only.
select setval('{schema}.event_seq', m.seq)
from (select max(e.seq) as seq from {schema}.event e) m, {schema}.event_seq s
where m.seq > s.last_value or m.seq = s.last_value and not s.is_called
