-- Progress that is behind: all but the newest ten rows of each lane, up to 10,000 at once. A statement of a former owner that is under way
-- still finds the row that refuses it.
delete from {schema}.cursor c
using (
  select d.subscription, d.lane, d.n from {schema}.lease l
  cross join lateral (
    select c.n from {schema}.cursor c where c.subscription = l.subscription and c.lane = l.lane order by c.n desc limit 1) newest
  cross join lateral (
    select c.subscription, c.lane, c.n from {schema}.cursor c
    where c.subscription = l.subscription and c.lane = l.lane and c.n < newest.n - 10 order by c.n limit 10000) d
  limit 10000) old
where c.subscription = old.subscription and c.lane = old.lane and c.n = old.n
