-- Keys of any length: an index on the key itself refuses one of 2,700 bytes, and with it the record of a whole page.
drop index {schema}.failed_key;
create index failed_key on {schema}.failed (subscription, lane, hashtextextended(key, 0), seq);

-- The BRIN of old keys was never used: sweeping switches bitmap scans off, and a BRIN has no other.
drop index {schema}.dedup_at;
create index dedup_at on {schema}.dedup (at);

-- How long a lease, or a sign of life, was meant to last: one that ends later than that from now was given before the clock was set back.
alter table {schema}.lease add column lasts interval;
alter table {schema}.member add column lasts interval;

update {schema}.meta set version = 2;
