//go:build tools

package main

import _ "github.com/nats-io/nats-server/v2" // the server's version is pinned beside the client's
