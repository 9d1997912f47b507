package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/progress"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/term"
)

// view prints what the demo does. Where it is no terminal it prints plain lines.
type view struct {
	out      io.Writer
	terminal bool
	width    int
}

func newView(out io.Writer) *view {
	v := &view{out: out, width: 100}
	if f, ok := out.(*os.File); ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb" { //nolint:gosec // a descriptor fits
		v.terminal = true
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 { //nolint:gosec // a descriptor fits
			v.width = w
		}
	}
	return v
}

// color colours on a terminal. go-pretty minds NO_COLOR.
func (v *view) color(s string, colors ...text.Color) string {
	if !v.terminal {
		return s
	}
	return text.Colors(colors).Sprint(s)
}

func (v *view) line(format string, args ...any) { _, _ = fmt.Fprintf(v.out, format+"\n", args...) }

// title begins a section.
func (v *view) title(s string) { v.line("\n%s", v.color(s, text.Bold)) }

// fact prints a label and lines of text, wrapped and indented.
func (v *view) fact(label string, facts ...string) {
	const indent = 14
	for _, fact := range facts {
		for _, l := range strings.Split(text.WrapSoft(visible(fact), max(40, min(v.width, 120)-indent-1)), "\n") {
			v.line("  %s%s", text.Pad(v.color(label, text.Faint), indent-2, ' '), strings.TrimRight(l, " "))
			label = ""
		}
	}
}

func (v *view) check(c check) {
	c.text = visible(c.text)
	if c.ok {
		v.line("  %s %s", v.color("✓", text.FgGreen), c.text)
		return
	}
	v.line("  %s %s", v.color("✗", text.FgRed, text.Bold), v.color(c.text, text.FgRed))
}

// warning prints a log record that the library wrote.
func (v *view) warning(r record) {
	said := r.message
	if remedy := r.attrs["remedy"]; remedy != "" {
		said += "; " + remedy
	}
	if err := r.attrs["error"]; err != "" {
		said += ": " + err
	}
	v.fact(strings.ToLower(r.level.String()), oneLine(said))
}

// progress shows how a run gets on, until the returned function is called.
func (v *view) progress(l *load) (stop func()) {
	if v.terminal {
		return v.bars(l)
	}
	return v.lines(l)
}

// bars are live.
func (v *view) bars(l *load) (stop func()) {
	w := progress.NewWriter()
	w.SetOutputWriter(v.out)
	w.SetUpdateFrequency(100 * time.Millisecond)
	w.SetTrackerLength(max(10, min(40, v.width-60)))
	w.SetMessageLength(11)
	w.SetTrackerPosition(progress.PositionRight)
	w.SetNumTrackersExpected(2)
	style := progress.StyleBlocks
	style.Options.Separator, style.Options.DoneString, style.Options.ErrorString = "  ", "done ", "stopped "
	style.Options.PercentFormat = "%4.0f%%"
	style.Options.TimeDonePrecision = 10 * time.Millisecond
	style.Options.TimeInProgressPrecision = 100 * time.Millisecond
	style.Visibility.ETA, style.Visibility.TrackerOverall = false, false
	style.Colors.Tracker = text.Colors{text.FgCyan}
	w.SetStyle(style)
	units := progress.Units{Formatter: func(n int64) string { return thousands(int(n)) }}
	published := &progress.Tracker{Message: "  published", Total: int64(l.events), Units: units}
	delivered := &progress.Tracker{Message: "  delivered", Total: int64(l.events), Units: units}
	w.AppendTrackers([]*progress.Tracker{published, delivered})
	update := func() {
		published.SetValue(l.published.Load())
		delivered.SetValue(l.delivered.Load())
	}
	rendered := make(chan struct{})
	go func() { w.Render(); close(rendered) }()
	end := every(50*time.Millisecond, update)
	return func() {
		end()
		update()
		// What is not complete now never will be.
		for _, t := range []*progress.Tracker{published, delivered} {
			if !t.IsDone() {
				t.MarkAsErrored()
			}
		}
		w.Stop()
		<-rendered
	}
}

// lines are for logs and pipes: one a second.
func (v *view) lines(l *load) (stop func()) {
	report := func() {
		v.line("  published %s of %s, delivered %s",
			thousands(int(l.published.Load())), thousands(l.events), thousands(int(l.delivered.Load())))
	}
	end := every(time.Second, report)
	return func() {
		end()
		report()
	}
}

// every calls f at intervals until the returned function is called, which waits for the last call.
func every(interval time.Duration, f func()) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				f()
			case <-quit:
				return
			}
		}
	}()
	return func() {
		close(quit)
		<-done
	}
}

// table prints all rows, and beneath it why some are missing.
func (v *view) table(rows []*row) {
	cells := [][]string{{
		"topology", "strategy", "transactions\nper second", "deliveries\nper second", "parsed per\nexecution",
		"retries", "notifies", "warnings", "errors",
	}}
	var notes []string
	for _, r := range rows {
		if r.outcome == nil {
			word, mark := "failed", v.color("✗", text.FgRed, text.Bold)
			if r.omitted != "" {
				word, mark = r.omitted, v.color("-", text.FgYellow)
			}
			notes = append(notes, oneLine(r.err.Error()))
			cells = append(cells, []string{mark + " " + r.name, fmt.Sprintf("%s (%d)", word, len(notes)), "", "", "", "", "", "", ""})
			continue
		}
		mark := v.color("✓", text.FgGreen)
		if !r.ok() {
			mark = v.color("✗", text.FgRed, text.Bold)
		}
		o := r.outcome
		cells = append(cells, []string{
			mark + " " + r.name, r.strategy(), rate(o.committed, o.publishing), rate(len(o.deliveries), o.delivering),
			fmt.Sprintf("%.4f", parsesPerExecution(o.stats)), number(o.stats.Retries),
			number(o.stats.Notifies), thousands(r.warned()), thousands(r.errors()),
		})
	}
	drawn := draw(cells, 3)
	if v.terminal && text.LongestLineLen(drawn) > v.width {
		drawn = draw(transpose(cells), 2)
	}
	v.line("\n%s", drawn)
	for i, note := range notes {
		v.line("(%d) %s", i+1, note)
	}
}

// draw draws a table whose first row is its head. Columns from right on, counted from one, are aligned to the right.
func draw(cells [][]string, right int) string {
	t := table.NewWriter()
	t.SetStyle(table.StyleRounded)
	t.Style().Format.Header = text.FormatDefault
	var config []table.ColumnConfig
	for n := right; n <= len(cells[0]); n++ {
		config = append(config, table.ColumnConfig{Number: n, Align: text.AlignRight, AlignHeader: text.AlignRight})
	}
	t.SetColumnConfigs(config)
	for i, line := range cells {
		r := make(table.Row, len(line))
		for j, cell := range line {
			r[j] = cell
		}
		if i == 0 {
			t.AppendHeader(r)
			continue
		}
		t.AppendRow(r)
	}
	return t.Render()
}

// transpose makes columns of rows, for a narrow terminal.
func transpose(cells [][]string) [][]string {
	out := make([][]string, len(cells[0]))
	for i := range out {
		for _, line := range cells {
			out[i] = append(out[i], strings.ReplaceAll(line[i], "\n", " "))
		}
	}
	return out
}

func rate(n int, d time.Duration) string {
	if d <= 0 {
		return "-"
	}
	return thousands(int(float64(n) / d.Seconds()))
}

// thousands writes a number with commas.
func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// finding prints what the doctor says could be better.
func (v *view) finding(f finding) {
	if f.Severity == problem {
		v.fact(v.color("✗ problem", text.FgRed, text.Bold), f.What)
	} else {
		v.fact(v.color("• note", text.FgYellow), f.What)
	}
	if f.Remedy != nil {
		v.fact("  remedy", *f.Remedy)
	}
}

// wrapped prints text over as many lines as it takes.
func (v *view) wrapped(said string) {
	for l := range strings.SplitSeq(text.WrapSoft(visible(said), v.width), "\n") {
		v.line("%s", strings.TrimRight(l, " "))
	}
}

// tied stands for a space at which no line breaks: the wrapping breaks at every kind that Unicode has.
const tied = "\ue000"

// tableOrList draws a table, or where the terminal is too narrow for it lists its rows: the first cell, and beneath it the others with
// what the head calls them. What is piped is always a table.
func (v *view) tableOrList(cells [][]string, right int) {
	for _, row := range cells {
		for i, cell := range row {
			row[i] = visible(cell)
		}
	}
	drawn := draw(cells, right)
	if !v.terminal || text.LongestLineLen(drawn) <= v.width {
		v.line("%s", drawn)
		return
	}
	for _, row := range cells[1:] {
		v.wrapped(cells[0][0] + " " + row[0])
		var parts []string
		for i := 1; i < len(row); i++ {
			if row[i] != "" {
				parts = append(parts, strings.ReplaceAll(cells[0][i]+" "+row[i], " ", tied))
			}
		}
		for l := range strings.SplitSeq(text.WrapSoft(strings.Join(parts, ", "), v.width-2), "\n") {
			v.line("  %s", strings.TrimRight(strings.ReplaceAll(l, tied, " "), " "))
		}
	}
}
