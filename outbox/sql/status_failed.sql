select subscription, count(*) filter (where state = 'retry'), count(*) filter (where state = 'parked'),
       count(*) filter (where state = 'dead')
from {schema}.failed group by subscription
