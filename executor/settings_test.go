package executor_test

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/internal/logrec"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

// settingsLines returns the warnings and infos about settings.
func settingsLines(log *logrec.Recorder) (lines []string) {
	for _, level := range []slog.Level{slog.LevelWarn, slog.LevelInfo} {
		for _, l := range log.At(level) {
			if strings.Contains(l, "settings of the connection string") {
				lines = append(lines, l)
			}
		}
	}
	return lines
}

// A pooler that ignores a startup parameter says nothing, so the executor does: once, and once more when it is mended.
func TestADroppedSettingIsWarnedAboutOnce(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionRaw, "1.18", "15").Start(t, func(o *pgbouncer.Options) {
		o.Settings["ignore_startup_parameters"] = "search_path,statement_timeout"
	})
	owner := connect(t, r.DB.URL)
	log := new(logrec.Recorder)
	pool := newPool(t, r.URL+"&search_path=tenant_a&statement_timeout=60000&application_name=shop")
	ex := newExecutor(t, pool, executor.Config{Logger: log.Logger(), ReprobeAfter: time.Millisecond})
	run := func() {
		if _, err := ex.Exec(t.Context(), "select 1", prepare.Stable); err != nil {
			t.Fatal(err)
		}
	}
	await.True(t, "several looks at the pooler", func() bool { run(); return ex.Stats().Probes >= 4 })
	lines := settingsLines(log)
	if len(lines) != 1 || !strings.Contains(lines[0], "settings=search_path, statement_timeout remedy=") {
		t.Errorf("%d lines: %q", len(lines), lines)
	}
	if strings.Contains(log.All(), "tenant_a") {
		t.Error("a value of the connection string is in the log")
	}

	mustExec(t, owner, "alter role postgres in database "+r.DB.Name+" set search_path = tenant_a")
	mustExec(t, owner, "alter role postgres in database "+r.DB.Name+" set statement_timeout = '1min'")
	if _, err := r.Bouncer.Admin("reconnect"); err != nil {
		t.Fatal(err)
	}
	await.True(t, "a look that finds them", func() bool { run(); return len(settingsLines(log)) > 1 })
	if lines := settingsLines(log); len(lines) != 2 || lines[1] != "bounceproof: the settings of the connection string hold" {
		t.Errorf("%q", lines)
	}
}

// The control: where the settings hold, or none are asked for, nothing is said, and no connection is opened to find that out.
func TestSettingsThatHoldAreNotWarnedAbout(t *testing.T) {
	t.Parallel()
	for _, p := range place.OneOfEachKind() {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			r := p.Start(t)
			for _, params := range []string{"", "&application_name=shop", "&timezone=utc"} {
				log := new(logrec.Recorder)
				ex := newExecutor(t, newPool(t, r.URL+params), executor.Config{Logger: log.Logger()})
				if _, err := ex.Exec(t.Context(), "select 1", prepare.Stable); err != nil {
					t.Fatal(err)
				}
				if lines := settingsLines(log); len(lines) > 0 || ex.Stats().Probes != 1 {
					t.Errorf("%s: %q, %d probes", params, lines, ex.Stats().Probes)
				}
			}
		})
	}
}
