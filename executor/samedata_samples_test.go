package executor_test

import (
	"encoding/json"
	"math/big"
	"net"
	"net/netip"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// sample is a Go value on its way into a column type. bare says what pgx's Exec mode, which knows no types, does with it: store something
// else, fail, or (empty) nothing that this test relies on.
type sample struct {
	typ  string
	arg  any
	bare string
}

func samples() []sample {
	kathmandu := time.FixedZone("Kathmandu", 5*3600+45*60)
	at := time.Date(2024, 2, 29, 1, 30, 15, 123456789, kathmandu) // in UTC still the day before
	text := func(s string) *string { return &s }
	big1, _ := new(big.Int).SetString("-123456789012345678901234567890", 10)
	var noDoc *doc
	all := []sample{
		{"json", []byte(`{"a": 1,  "b":[true,null]}`), "fails"},
		{"json", `{"a": "x\n"}`, ""},
		{"json", doc{1, []string{"x"}}, "fails"},
		{"json", map[string]any{"k": 1.5, "n": nil}, "fails"},
		{"json", json.RawMessage(` {"raw" :1} `), ""},
		{"json", []string{"a", "b"}, "fails"},
		{"json", &doc{A: 2}, "fails"},
		{"json", noDoc, ""},
		{"json", 42, ""},
		{"json", true, ""},
		{"jsonb", []byte(`{"b": 1, "a": {}}`), "fails"},
		{"jsonb", `"text"`, ""},
		{"jsonb", doc{3, nil}, "fails"},
		{"jsonb", map[string]int{"z": 1, "a": 2}, "fails"},
		{"jsonb", json.RawMessage(`[1,2]`), ""},
		{"jsonb", []int{1, 2}, "fails"},
		{"jsonb", []doc{{A: 1}}, "fails"},
		{"jsonb", noDoc, ""},
		{"text", "a'b\\\"ü\n", ""},
		{"text", mood("ok"), ""},
		{"text", text("p"), ""},
		{"varchar(8)", "short", ""},
		{"char(6)", "pad", ""},
		{"bytea", []byte{0, 1, 0xff, '\\'}, ""},
		{"bytea", []byte{}, ""},
		{"bytea", blob{7}, ""},
		{"bytea", []byte(nil), ""},
		{"numeric", "12345678901234567890.0987654321", ""},
		{"numeric", 1.25, ""},
		{"numeric", 7, ""},
		{"numeric", big1, ""},
		{"numeric", pgtype.Numeric{Int: big.NewInt(1250), Exp: -2, Valid: true}, ""},
		{"numeric(6,2)", 3.14159, ""},
		{"uuid", [16]byte{1, 2, 3, 15: 0xff}, "fails"},
		{"uuid", "0b0f2a34-0000-4000-8000-00000000000a", ""},
		{"uuid", pgtype.UUID{Bytes: [16]byte{9}, Valid: true}, ""},
		{"inet", netip.MustParseAddr("10.1.2.3"), ""},
		{"inet", netip.MustParsePrefix("fe80::1/64"), ""},
		{"inet", "192.168.0.0/16", ""},
		{"inet", net.IPv4(127, 0, 0, 1), ""},
		{"cidr", netip.MustParsePrefix("10.0.0.0/8"), ""},
		{"timestamp", at, "differs"},
		{"timestamp", at.UTC(), ""},
		{"timestamp", "2024-02-29 01:30:15.5", ""},
		{"timestamp", pgtype.Timestamp{InfinityModifier: pgtype.Infinity, Valid: true}, ""},
		{"timestamptz", at, ""},
		{"timestamptz", at.UTC(), ""},
		{"timestamptz", &at, ""},
		{"date", at, "differs"},
		{"date", "2024-02-29", ""},
		{"time", pgtype.Time{Microseconds: 3_600_000_001, Valid: true}, ""},
		{"interval", 90 * time.Minute, ""},
		{"interval", pgtype.Interval{Months: 14, Days: -3, Valid: true}, ""},
		{"mood", mood("happy"), ""},
		{"mood", "sad", ""},
		{"mood[]", []mood{"sad", "happy"}, "fails"},
		{"mood[]", []string{"ok"}, ""},
		{"mood[]", []mood{}, ""},
		{"mood[]", []mood(nil), ""},
		{"pair", pair{1, text("x,\"y"), "ok"}, "fails"},
		{"pair", pair{2, nil, "sad"}, "fails"},
		{"pair[]", []pair{{A: 1, C: "ok"}}, "fails"},
		{"int4range", pgtype.Range[int32]{Lower: 1, Upper: 9, LowerType: pgtype.Inclusive, UpperType: pgtype.Exclusive, Valid: true}, ""},
		{"int4range", "(,5]", ""},
		{"int4range", "empty", ""},
		{"tstzrange", pgtype.Range[time.Time]{Lower: at, LowerType: pgtype.Exclusive, UpperType: pgtype.Unbounded, Valid: true}, ""},
		{"hstore", pgtype.Hstore{"k": text("v"), "n": nil}, ""},
		{"hstore", map[string]*string{"a=>": text("\"b")}, ""},
		{"hstore", map[string]string{"m": "s"}, "fails"},
		{"bigint", weight(70), ""},
		{"bigint", int64(1) << 62, ""},
		{"bigint", "12", ""},
		{"int", weight(5), ""},
		{"smallint", int8(-3), ""},
		{"text", weight(8), ""},
		{"float8", 0.1, ""},
		{"float8", float32(0.1), ""},
		{"float4", 1e-3, ""},
		{"boolean", true, ""},
		{"boolean", "f", ""},
		{"int[]", []int32{1, 2}, ""},
		{"int[]", [][]int{{1, 2}, {3, 4}}, ""},
		{"int[]", []*int{nil}, ""},
		{"text[]", []string{"a b", "", "null"}, ""},
		{"uuid[]", [][16]byte{{1}}, "fails"},
		{"posint", 12, ""},
		{"money", "12.34", ""},
		{"xml", "<a/>", ""},
		{"point", pgtype.Point{P: pgtype.Vec2{X: 1, Y: 2.5}, Valid: true}, ""},
		{"bit(3)", "101", ""},
		{"macaddr", net.HardwareAddr{1, 2, 3, 4, 5, 6}, ""},
	}
	for _, typ := range []string{"json", "jsonb", "mood[]", "pair", "int4range", "hstore", "numeric", "uuid", "inet", "timestamptz", "date", "bigint", "posint"} {
		all = append(all, sample{typ, nil, ""})
	}
	return all
}
