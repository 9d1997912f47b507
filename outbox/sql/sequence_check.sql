select s.seqcache, s.seqincrement, s.seqcycle,
       exists (select 1 from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = s.seqrelid and d.deptype in ('a', 'i')
               and d.refobjsubid > 0),
       v.last < greatest((select max(t.tip) from {schema}.tick t),
                         (select max(m.seq) from {schema}.meta x
                          cross join lateral generate_series(0, x.lanes - 1) as l (lane)
                          cross join lateral (select e.seq from {schema}.event e where e.lane = l.lane
                                              order by e.seq desc limit 1) m))
from pg_sequence s
cross join (select coalesce(pg_sequence_last_value(q.tableoid), 0) as last from {schema}.event_seq q) v
where s.seqrelid = '{schema}.event_seq'::regclass
