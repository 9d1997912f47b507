package main

import (
	"context"
	"encoding/json"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/fallback"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestDoctor(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		mode    place.Mode
		bouncer string
		track   int // max_prepared_statements
		code    int
		strict  int
		auto    string
		shared  string
		listens string
	}{
		"direct":         {place.Direct, "", 0, exitOK, exitOK, "named", "named", "proven"},
		"raw":            {place.TransactionRaw, "1.18", 0, exitFailed, exitFailed, "unprepared", "shared", "isolated"},
		"raw_session":    {place.Session, "1.18", 0, exitOK, exitOK, "named", "named", "proven"},
		"raw_statement":  {place.Statement, "1.18", 0, exitFailed, exitFailed, "unprepared", "shared", "isolated"},
		"tracks":         {place.TransactionTracked, "1.24", 200, exitOK, exitFailed, "named", "named", "isolated"},
		"tracking_off":   {place.TransactionRaw, "1.24", -1, exitFailed, exitFailed, "unprepared", "shared", "isolated"},
		"tracks_session": {place.Session, "1.24", 200, exitOK, exitOK, "named", "named", "proven"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := place.New(test.mode, test.bouncer, "").Start(t, func(o *pgbouncer.Options) {
				o.MaxPreparedStatements = test.track
			}).URL
			code, stdout, stderr := command(t.Context(), "doctor", address)
			if code != test.code || stderr != "" {
				t.Errorf("status %d, want %d; %s", code, test.code, stderr)
			}
			golden(t, "doctor_"+name, mask(stdout))

			code, stdout, _ = command(t.Context(), "doctor", "--json", "--strict", address)
			if code != test.strict {
				t.Errorf("with --strict: status %d, want %d", code, test.strict)
			}
			var d diagnosis
			if err := json.Unmarshal([]byte(stdout), &d); err != nil {
				t.Fatalf("%v:\n%s", err, stdout)
			}
			if d.Strategies.Auto != test.auto || d.Strategies.Shared != test.shared || d.Listen.State != test.listens || d.OK != (code == exitOK) {
				t.Errorf("%s", stdout)
			}
			if len(d.Topology.Evidence) == 0 {
				t.Error("a verdict without evidence")
			}
		})
	}
}

// A password is printed by no path: not by success, not by a refusal, and not by a string that cannot be parsed.
func TestDoctorKeepsPasswords(t *testing.T) {
	const password = "s3cr3t"
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	conn, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	with, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	with.User = url.UserPassword(with.User.Username(), password)
	wrong := *with
	wrong.Path = "/does_not_exist"
	host := with.Host
	for name, test := range map[string]struct {
		address string
		code    int
		says    string
	}{
		"works":          {with.String(), exitOK, "direct"},
		"no database":    {wrong.String(), exitFailed, "does_not_exist"},
		"no server":      {"postgres://app:" + password + "@127.0.0.1:1/x", exitFailed, "connection refused"},
		"at sign":        {"postgres://app:x@" + password + "%zz@" + host + "/x", exitFailed, "%40"},
		"slash":          {"postgres://app:" + password + "/x@" + host + "/x", exitFailed, "%2F"},
		"keywords":       {"host=127.0.0.1 port=nonsense password=" + password, exitFailed, "port is a number"},
		"pool setting":   {with.String() + "&pool_max_conns=" + password, exitFailed, "whole numbers"},
		"unknown scheme": {"mysql://app:" + password + "@" + host + "/x", exitFailed, "mysql://"},
	} {
		for _, flag := range []string{"--json=false", "--json"} {
			code, stdout, stderr := command(t.Context(), "doctor", flag, test.address)
			if said := stdout + stderr; code != test.code || strings.Contains(said, password) || !strings.Contains(said, test.says) {
				t.Errorf("%s %s: status %d\n%s%s", name, flag, code, stdout, stderr)
			}
		}
	}
}

func TestDoctorReadsTheEnvironment(t *testing.T) {
	s := postgres.Start(t, postgres.Options{})
	db := s.NewDatabase(t)
	t.Setenv(envURL, db.URL)
	code, stdout, stderr := command(t.Context(), "doctor")
	if code != exitOK || !strings.Contains(stdout, db.Name) {
		t.Errorf("status %d\n%s%s", code, stdout, stderr)
	}
}

func TestDoctorOnAStandby(t *testing.T) {
	t.Parallel()
	d := &diagnosis{OK: true, Server: &server{number: 120000, Standby: true}}
	d.checkTopology(fallback.Topology{Pooler: fallback.PoolerNone, Mode: fallback.ModeDirect})
	if len(d.Findings) != 2 || d.Findings[0].Severity != problem || d.Findings[1].Severity != note {
		t.Errorf("%+v", d.Findings)
	}
}
