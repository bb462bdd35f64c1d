// llama-server in the process of its runtime: additional routes, and how it ends. libpyorch-server has these functions
// and links llama-server. A process has one server.
//
// Only declarations below the guard, as in pyorch.h. Any thread may call the functions.

#ifndef PYORCH_SERVER_H
#define PYORCH_SERVER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A request for one of the routes. Valid during the call.
typedef struct pyorch_exchange {
    const char * headers; // "name: value\n" of each
    const char * body;
    uint64_t     body_size;
    const char * data; // llama-server's own answer, if it has the route
    uint64_t     data_size;
    int32_t      status; // of this answer; 404 without the route
    int32_t      local;  // nonzero: the request came over the loopback interface or a Unix socket
    void *       answer;
    const void * request;
} pyorch_exchange;

// Answers a request with pyorch_server_answer(); if it does not call it, llama-server's own answer is sent. The thread
// of the connection calls it.
typedef void (*pyorch_answer_fn)(void * user, const pyorch_exchange * exchange);

// A status of an answer: llama-server answers a request with `data` as its body. REQUIRES: the route is
// PYORCH_SERVER_FIRST.
typedef enum pyorch_server_status {
    PYORCH_SERVER_CONTINUE = 100,
} pyorch_server_status;

// Answers a request. location: for a redirection, otherwise NULL.
void pyorch_server_answer(const pyorch_exchange * exchange, int32_t status, const char * type, const char * location,
    const char * data, uint64_t data_size);

// Returns nonzero if the client has closed the connection.
int32_t pyorch_server_has_left(const pyorch_exchange * exchange);

typedef enum pyorch_server_when {
    PYORCH_SERVER_BEHIND = 0, // after llama-server, whose own answer the callback sees, if it has the route
    PYORCH_SERVER_FIRST  = 1, // before llama-server, which answers other requests; data is empty and status 0
    PYORCH_SERVER_FAILED =
        2, // after llama-server answered with a status of 500 or more; the callback may replace the answer.
           // For a stream, it sees each part with an error, without the request
} pyorch_server_when;

// Adds a route of the server that runs next: "GET" or "POST", and its path.
void pyorch_server_add_route(
    const char * method, const char * path, int32_t when, pyorch_answer_fn answer, void * user);

// Passes llama-server's own answer to `answer`, in status and data of the exchange, if it has the path and runs.
// parameters: "name=value&..." of the path and of the query, may be empty. seconds: the longest wait; a later answer is
// empty.
void pyorch_server_ask(const char * path, const char * parameters, const char * body, double seconds,
    pyorch_answer_fn answer, void * user);

// Passes each JSON schema (of answers, tools and flags) to `check` as the body, before it becomes a grammar. If the
// check answers, the schema is refused with status 400 and its data as the reason. The thread of the connection calls
// it, until the server has ended.
void pyorch_server_check_schemas(pyorch_answer_fn check, void * user);

// Passes the headers of each request to `check`, before its body is read, until the server has ended. If the check
// answers, the request gets status 403 with the data of the answer, and its connection ends. The thread of the
// connection calls it.
void pyorch_server_check_heads(pyorch_answer_fn check, void * user);

// Lets requests for this path, with --api-prefix in front, pass without an API key.
void pyorch_server_make_public(const char * path);

// A file of llama-server's chat page. It is a part of the library.
typedef struct pyorch_page_file {
    const char * path; // relative to "/", where index.html is, too
    const char * type; // the content type
    const char * etag; // the entity tag, in quotes
    const char * data;
    uint64_t     size;
    int32_t      gzip; // whether data is compressed
} pyorch_page_file;

// Writes the i-th file of the chat page; returns 0 after the last. There are none if the page was not built.
int32_t pyorch_server_get_page(uint64_t i, pyorch_page_file * file);

// Sets the seconds in which the head and the body of a request must arrive; otherwise its connection is ended.
void pyorch_server_set_limits(double head, double body);

// Names each ggml_backend_dev_t of another process that the next server computes with: if one is lost, computing fails.
// Default: none.
void pyorch_server_set_devices(int32_t n, void * const * devices);

// Copies llama-server's refusal of its arguments into text, "" if it accepts them. REQUIRES: no argument makes it print
// and exit. Output of other threads to stderr is lost during the call.
void pyorch_server_check_arguments(int32_t argc, char ** argv, char * text, uint64_t text_size);

// Runs llama-server until pyorch_server_cancel(), and returns its exit status. The caller handles signals. A second
// call starts without the settings of the first, except public paths.
int32_t pyorch_server_run(int32_t argc, char ** argv);

// Returns the server's llama_context *, NULL while its model is not loaded. Valid until the server ends, which waits
// for running requests.
void * pyorch_server_get_context(void);

// Numbers of connections.
typedef struct pyorch_connections {
    uint64_t arriving;  // without a complete request
    uint64_t answering; // with a request that the server is answering
} pyorch_connections;

// Returns the numbers of connections.
void pyorch_server_get_connections(pyorch_connections * connections);

// Returns the seconds that the oldest of n waiting requests has waited: the n that arrived last wait, because requests
// begin in the order of their arrival. The request of the calling thread does not count.
double pyorch_server_get_waited(uint64_t n);

// Accepts no more connections, and ends connections without a complete request. Does nothing before the server answers.
void pyorch_server_stop_accepting(void);

// Ends running answers within about a second, streams with a part that says so, others with status 503, until
// pyorch_server_run() is called again. REQUIRES: pyorch_server_stop_accepting().
void pyorch_server_end_answers(void);

// Ends the other connections with their requests, and lets pyorch_server_run() return after the running computation.
// REQUIRES: pyorch_server_end_answers().
void pyorch_server_cancel(void);

#ifdef __cplusplus
}
#endif

#endif
