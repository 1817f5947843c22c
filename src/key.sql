WITH RECURSIVE input AS (
    SELECT int4send($1::int4) || convert_to($2::text, 'UTF8') AS bytes
), fnv (i, h) AS (
    SELECT 0, 14695981039346656037::numeric
    UNION ALL
    SELECT i + 1,
           ((h - h % 256 + ((h % 256)::int # get_byte(bytes, i))) * 1099511628211)
               % 18446744073709551616
    FROM fnv, input
    WHERE i < length(bytes)
)
SELECT (CASE WHEN h >= 9223372036854775808 THEN h - 18446744073709551616 ELSE h END)::bigint AS key
FROM fnv ORDER BY i DESC LIMIT 1
