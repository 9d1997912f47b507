package pgscript

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
)

// LISTEN, UNLISTEN and pg_notify($1, $2) take effect at once, and not with the transaction.

// NoAnswer is an error for [Statement.Fail] and [Backend.OnExecute] that is never sent: from then on the connection takes everything and
// answers nothing.
var NoAnswer = &pgproto3.ErrorResponse{Severity: "NO ANSWER"}

// listener is what a connection listens on, and what it was not yet told.
type listener struct {
	channels map[string]bool
	notes    []*pgproto3.NotificationResponse
	hasNotes chan struct{} // capacity 1
	stalled  bool
}

// OnExecute has f asked before each text is executed, on the goroutine of the connection. An error that it returns is the text's.
func (b *Backend) OnExecute(f func(sql string) *pgproto3.ErrorResponse) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.onExecute = f
}

func (b *Backend) executes(sql string) *pgproto3.ErrorResponse {
	b.mu.Lock()
	f := b.onExecute
	b.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(sql)
}

// Notify delivers a notification to the connections that listen on the channel.
func (b *Backend) Notify(channel, payload string) {
	b.deliver(channel, payload, func(c *client) bool { return c.channels[channel] })
}

// Broadcast delivers a notification to all connections, as those of a shared server connection get what others listen for. A connection
// that has never listened does not get it.
func (b *Backend) Broadcast(channel, payload string) {
	b.deliver(channel, payload, func(*client) bool { return true })
}

func (b *Backend) deliver(channel, payload string, to func(*client) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.silent {
		return
	}
	for c := range b.clients {
		if c.hasNotes == nil || !to(c) {
			continue
		}
		c.notes = append(c.notes, &pgproto3.NotificationResponse{PID: 1, Channel: channel, Payload: payload})
		select {
		case c.hasNotes <- struct{}{}:
		default:
		}
	}
}

// LoseNotifications has LISTEN succeed and nothing arrive, or notifications arrive again.
func (b *Backend) LoseNotifications(lose bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.silent = lose
}

// Channels returns what connections listen on, sorted, each channel as often as there are connections that do.
func (b *Backend) Channels() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var channels []string
	for c := range b.clients {
		for channel := range c.channels {
			channels = append(channels, channel)
		}
	}
	slices.Sort(channels)
	return channels
}

// StallAll makes every connection there is take everything and answer nothing, until the client closes it. New ones work.
func (b *Backend) StallAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.clients {
		c.stalled = true
	}
}

func (c *client) isStalled() bool {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	return c.stalled
}

var listens = regexp.MustCompile(`(?i)^(listen|unlisten) "?(.*?)"?$`)

// listen executes LISTEN and UNLISTEN.
func (c *client) listen(sql string) {
	m := listens.FindStringSubmatch(sql)
	if m == nil {
		return
	}
	channel := strings.ReplaceAll(m[2], `""`, `"`)
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	if strings.EqualFold(m[1], "unlisten") {
		delete(c.channels, channel)
		return
	}
	if c.hasNotes == nil {
		c.channels, c.hasNotes = map[string]bool{}, make(chan struct{}, 1)
		c.b.working.Go(c.sendNotes)
	}
	c.channels[channel] = true
}

// notify executes pg_notify($1, $2), with a stamp where the text asks for one.
func (c *client) notify(sql string, args []string) {
	if len(args) != 2 || !strings.Contains(sql, "pg_notify($1, $2") {
		return
	}
	if strings.Contains(sql, "pg_postmaster_start_time") {
		args[1] += " " + c.b.Stamp()
	}
	c.b.Notify(args[0], args[1])
}

// Stamp returns a server's clock in microseconds and what it says of itself, no two backends the same.
func (b *Backend) Stamp() string {
	return fmt.Sprintf("%d %p.a database", time.Now().UnixMicro(), b)
}

// Stamped reports whether a stamp with this identity and clock is the backend's own and not older than so many microseconds.
func (b *Backend) Stamped(identity, clock, oldest string) bool {
	stamp, err := strconv.ParseInt(clock, 10, 64)
	limit, err2 := strconv.ParseInt(oldest, 10, 64)
	age := time.Now().UnixMicro() - stamp
	return err == nil && err2 == nil && identity == fmt.Sprintf("%p.a database", b) && age >= 0 && age <= limit
}

// sendNotes sends notifications as they come, so that nobody who notifies waits for a reader.
func (c *client) sendNotes() {
	for {
		select {
		case <-c.ended:
			return
		case <-c.hasNotes:
		}
		c.b.mu.Lock()
		notes := c.notes
		c.notes = nil
		if c.stalled {
			notes = nil
		}
		c.b.mu.Unlock()
		for _, n := range notes {
			if c.write(n) != nil {
				return
			}
		}
	}
}
