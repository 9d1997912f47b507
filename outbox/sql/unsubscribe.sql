with a as (delete from {schema}.cursor where subscription = $1::text),
     b as (delete from {schema}.lease where subscription = $1::text),
     c as (delete from {schema}.member where subscription = $1::text),
     d as (delete from {schema}.failed where subscription = $1::text)
delete from {schema}.subscription where name = $1::text
